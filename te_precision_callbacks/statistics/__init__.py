"""Statistics: their table, the grammar of their names, series, and schedules."""

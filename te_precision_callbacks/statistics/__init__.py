"""Statistics: the table of all of them, the grammar of their names, series, and when they are due."""

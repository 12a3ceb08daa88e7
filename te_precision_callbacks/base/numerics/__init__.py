"""The arithmetic of formats and recipes, shared by the statistics, the dumps and the reference backend."""

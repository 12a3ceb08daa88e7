"""The arithmetic of formats and recipes, once: for the statistics, the dumps and the reference backend."""

"""Reference of configs for pages, terminals and editors, generated from the schemas."""

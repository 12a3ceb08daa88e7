"""Reference of configs for pages and terminals, generated from the schemas."""

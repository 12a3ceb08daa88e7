"""What a config may say, for readers: on a page, in a terminal, in an editor. All of it is read from the schemas."""

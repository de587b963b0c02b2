"""Which requests the server accepts from browsers, and from the pages of which sites."""

"""The report as a page: one static file that a newcomer looks at before reading anything."""

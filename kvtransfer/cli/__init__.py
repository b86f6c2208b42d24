"""Words: one file a command. Parse, call one job, print, exit with the report's truth."""

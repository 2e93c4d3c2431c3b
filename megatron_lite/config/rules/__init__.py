"""Rules that join fields, one file per theme; a rule is a generator of problems (`common.Rule`)."""

"""Reading text: folders, files, JSON lines, data sets and BEIR folders, with a report of what was skipped."""

"""Where text comes from: folders, files, JSON lines, data sets and BEIR folders, read with a report of what was left out."""

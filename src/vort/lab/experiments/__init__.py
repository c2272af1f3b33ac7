"""One file for each table or figure of the paper: its cells, and what they show."""

"""One file for each table or figure of the paper: what is run, and what it is held against."""

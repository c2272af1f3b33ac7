"""Commands of `vort`, one file each; `vort.cli` puts them together."""

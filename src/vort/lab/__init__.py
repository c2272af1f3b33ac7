"""The lab: what only experiments need, behind the extra `lab`."""

"""`retention`: one signature, checked arguments, and the backend that suits the machine."""

"""What GPU kernels of several ops share: how they are launched, how they read and write rows."""

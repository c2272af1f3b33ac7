"""`python -m vort`, which launchers of several processes start: `torchrun -m vort train ...`."""

from vort.cli import main

if __name__ == "__main__":
    main()

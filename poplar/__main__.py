"""`python -m poplar`: the command line, as `torchrun -m poplar` starts it on every rank."""

from poplar.cli import main

if __name__ == "__main__":
    main()

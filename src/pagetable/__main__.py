"""`python -m pagetable` is the `pagetable` command."""

from pagetable.cli import main

main()

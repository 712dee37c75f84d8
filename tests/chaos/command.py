"""The `evener` command with the quick harness in its runner's table."""

from evener.cli.main import main
from tests.chaos.quick import register

if __name__ == "__main__":
    register()
    main()

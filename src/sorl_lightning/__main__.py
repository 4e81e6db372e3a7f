"""``python -m sorl_lightning`` is ``sorl``."""

from sorl_lightning.cli import main

if __name__ == "__main__":
    main()

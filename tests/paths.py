"""Where this clone lies, and the line by which a new interpreter imports it, installed or not."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REGISTER = f"import runpy; runpy.run_path({str(ROOT / 'launch' / '_root.py')!r})\n"

# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One self-contained HTML page from dumped episodes; run it with `python -m recipe.agent_env.trajectory_page`.

`dumps.py` reads the dumps, `encoding.py` packs them, `__main__.py` is the command, `page.html`, `page.css` and
`page.js` are what the browser gets.
"""

"""What MkDocs does to the pages of docs/ beside rendering them: they are written for a reader of the repository.

A link out of docs/ leads to the file in the repository, a block of code that names its file shows the name, and
`a[i][j]` in a text is no link.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]+)\)")
_NAMED_BLOCK = re.compile(r"(?m)^```(\w+) ([\w./-]+)$")
_CODE_OR_INDICES = re.compile(r"(?s)(```.*?```|``.*?``|`[^`]*`)|\]\[")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text as MkDocs takes it."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def led(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return match[0] if path.startswith("docs/") else f"]({config.repo_url}/blob/main/{path})"

    text = _CODE_OR_INDICES.sub(lambda match: match[1] or r"]\[", _LINK.sub(led, markdown))
    return _NAMED_BLOCK.sub(r'```\1 title="\2"', text)

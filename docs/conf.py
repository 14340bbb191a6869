"""Configuration of the documentation site: `sphinx-build -W docs build/docs`."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "nnfmq"
author = "the nnfmq authors"
copyright = "the nnfmq authors, Apache-2.0"
release = metadata.version("nnfmq")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "cli_reference",
    "docstrings",
]
exclude_patterns = ["examples", "c", "_ext"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {  # shown by these names; the parameters' texts say what they are
    name: name.removeprefix("_")
    for name in ("ModelArgument", "InputValue", "Preference", "PriorityArgument", "SourceArgument", "Shapes", "_Shapes")
}
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "nnfmq"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

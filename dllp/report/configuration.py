"""What makes the same run again: the command, every setting, and where it ran."""

from __future__ import annotations

from dllp.report.contents import Run
from dllp.report.figures import Section
from dllp.report.markup import definitions, folded
from dllp.report.names import html_text


def section(run: Run) -> Section:
    command = f'<pre tabindex="0"><code>{html_text(run.command, 4000)}</code></pre>' if run.command else ""
    known = {name: value for name, value in run.info.items() if not isinstance(value, (dict, list))}
    settings = folded("Every setting", definitions(run.settings or run.config))
    place = folded("Versions and hardware", definitions(known))
    return Section("configuration", "Configuration", markup=command + settings + place)

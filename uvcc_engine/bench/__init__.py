"""Every benchmark that docs/benchmarks.md quotes: one file per ``uvcc-engine bench NAME``.

The rooms beside them hold what they share: ``scenarios``, ``party`` (programs of one process), ``peers`` (other
systems on the same work), ``work``, ``timing`` and ``launch``.
"""

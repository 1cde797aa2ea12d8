"""Two themes of our own, dark and light. Party colours are told apart by all common kinds of colour blindness."""

from __future__ import annotations

from textual.theme import BUILTIN_THEMES, Theme

# Okabe and Ito's set, lightened or darkened for the background they stand on
DARK = Theme(
    name="uvcc-dark",
    primary="#7aa2f7",
    secondary="#5c7cba",
    accent="#7aa2f7",
    foreground="#d5d9e3",
    background="#11141b",
    surface="#11141b",
    panel="#1b2029",
    success="#4fc08d",
    warning="#e5b454",
    error="#ff6b5e",
    dark=True,
    variables={
        "uvcc-muted": "#98a1b3",
        "uvcc-faint": "#667085",
        "uvcc-p0": "#56b4e9",
        "uvcc-p1": "#e69f00",
        "uvcc-p2": "#d58cc0",
        "uvcc-select": "#2a3140",
        "uvcc-frame": "#343c4c",
        "uvcc-focus": "#7aa2f7",
        "uvcc-alarm": "#d7263d",
        "uvcc-on-alarm": "#ffffff",
        "uvcc-amber": "#e5b454",
        "uvcc-on-amber": "#16130a",
        "uvcc-blue": "#4f7fd9",
        "uvcc-on-blue": "#ffffff",
        "uvcc-green": "#3d9a70",
        "uvcc-on-green": "#ffffff",
        "uvcc-band-full": "#3a161c",
        "uvcc-band-smoke": "#352a12",
        "uvcc-band-replay": "#162848",
        "uvcc-band-plain": "#1b2029",
        "footer-background": "#1b2029",
        "footer-foreground": "#d5d9e3",
        "footer-key-foreground": "#7aa2f7",
        "input-selection-background": "#2a3140",
        "border": "#7aa2f7",
        "border-blurred": "#343c4c",
        "scrollbar": "#343c4c",
        "scrollbar-background": "#11141b",
        "scrollbar-corner-color": "#11141b",
        "scrollbar-hover": "#525a6b",
        "scrollbar-active": "#7aa2f7",
        "scrollbar-background-hover": "#11141b",
        "scrollbar-background-active": "#11141b",
    },
)
LIGHT = Theme(
    name="uvcc-light",
    primary="#2f5fc4",
    secondary="#4a6fb5",
    accent="#2f5fc4",
    foreground="#1c2330",
    background="#f7f8fa",
    surface="#f7f8fa",
    panel="#e9ecf1",
    success="#12784e",
    warning="#8a5a00",
    error="#c01f2e",
    dark=False,
    variables={
        "uvcc-muted": "#5b6475",
        "uvcc-faint": "#9aa2b1",
        "uvcc-p0": "#0072b2",
        "uvcc-p1": "#b35900",
        "uvcc-p2": "#a23b82",
        "uvcc-select": "#d5deef",
        "uvcc-frame": "#c3c9d4",
        "uvcc-focus": "#2f5fc4",
        "uvcc-alarm": "#c01f2e",
        "uvcc-on-alarm": "#ffffff",
        "uvcc-amber": "#f0c050",
        "uvcc-on-amber": "#2b2000",
        "uvcc-blue": "#2f5fc4",
        "uvcc-on-blue": "#ffffff",
        "uvcc-green": "#12784e",
        "uvcc-on-green": "#ffffff",
        "uvcc-band-full": "#f6d9dc",
        "uvcc-band-smoke": "#f6e9c8",
        "uvcc-band-replay": "#d6e2f8",
        "uvcc-band-plain": "#e9ecf1",
        "footer-background": "#e9ecf1",
        "footer-key-foreground": "#2f5fc4",
        "border": "#2f5fc4",
        "border-blurred": "#c3c9d4",
        "scrollbar": "#c3c9d4",
        "scrollbar-background": "#f7f8fa",
        "scrollbar-corner-color": "#f7f8fa",
    },
)
THEMES = (DARK, LIGHT)
DEFAULTS = {key: value for key, value in DARK.variables.items() if key.startswith("uvcc-")}


def theme_named(word: str) -> str:
    """A theme's name as Textual has it: ``light`` and ``dark`` are the console's own two."""
    return {"light": LIGHT.name, "dark": DARK.name}.get(word, word)


def is_theme(word: str) -> bool:
    """Whether there is a theme of this name: one of the console's own two, or one of Textual's."""
    return theme_named(word) in {*BUILTIN_THEMES, *(theme.name for theme in THEMES)}

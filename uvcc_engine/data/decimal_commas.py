"""Numbers with a decimal comma, as German or French programs export them: which tables hold some, and their reading.

A schema says ``decimal: ","`` of the whole table, as pandas' ``decimal`` does; then a point in a number is refused,
which may part thousands. Nothing is guessed while rows are shared: only ``uvcc data infer`` looks for commas.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.csv_table import CsvTable, as_number, is_missing
from uvcc_engine.data.schema import BINNED, COMMA, COUNT, NUMERIC, REAL, Schema

_SEMICOLON: Final = ";"
_WITH_COMMA: Final = re.compile(r"[-+]?(\d+,\d*|,\d+)([eE][-+]?\d+)?")
_GROUPED: Final = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")
_LIKE_A_NUMBER: Final = re.compile(r"[-+]?[\d., '\u00a0]*\d[\d., '\u00a0]*")


def holds_decimal_commas(table: CsvTable) -> bool:
    """Whether a table parted by semicolons has columns of nothing but numbers, some with a decimal comma.

    Raises ConfigError naming row and column where commas may part thousands, or stand beside points.
    """
    if table.delimiter != _SEMICOLON:
        return False
    found = {name: at for name in table.columns if (at := _first_comma(table, name)) is not None}
    if not found:
        return False
    sure = [name for name in found if not _grouped(table.columns[name])]
    if not sure:
        name, row = next(iter(found.items()))
        cell = table.columns[name][row]
        what = f"{table.place(row, name)} holds {cell!r}: {cell.replace(',', '.')} or {cell.replace(',', '')}"
        raise ConfigError(what, 'write it without the comma if that parts thousands; else decimal: "," in a schema')
    for name, cells in table.columns.items():
        if name in found or not any("." in cell for cell in cells):
            continue
        if all(is_missing(cell) or as_number(cell) is not None for cell in cells):
            row = next(row for row, cell in enumerate(cells) if "." in cell)
            raise _with_point(table, row, name, f"column {sure[0]!r} has decimal commas")
    return True


def _first_comma(table: CsvTable, name: str) -> int | None:
    """The first row with a decimal comma of a column of nothing but numbers; None where it is another. Raises
    ConfigError where other cells of it look like numbers, too, and are none."""
    cells = table.columns[name]
    commas = [row for row, cell in enumerate(cells) if _WITH_COMMA.fullmatch(cell)]
    if not commas or not all(is_missing(cell) or _LIKE_A_NUMBER.fullmatch(cell) for cell in cells):
        return None
    for row, cell in enumerate(cells):
        whole = is_missing(cell) or _WITH_COMMA.fullmatch(cell) or (as_number(cell) is not None and "." not in cell)
        if not whole:
            raise _with_point(table, row, name, f"row {commas[0] + 1} of it has a decimal comma")
    return commas[0]


def _grouped(cells: list[str]) -> bool:
    """Whether each comma may as well part thousands."""
    return all(_GROUPED.fullmatch(cell) for cell in cells if "," in cell)


def _with_point(table: CsvTable, row: int, name: str, beside: str) -> ConfigError:
    what = f"{table.place(row, name)} holds {table.columns[name][row][:40]!r}, and {beside}"
    return ConfigError(what, "write every number of the table like 1234,5, without points or gaps between thousands")


def as_read(table: CsvTable, schema: Schema) -> CsvTable:
    """The table with its numbers as programs write them, where the schema says that they have decimal commas.

    Raises ConfigError naming row and column for a point in a number.
    """
    if schema.decimal != COMMA:
        return table
    held = [one.name for one in schema.used if one.kind in (*NUMERIC, BINNED)]
    held += [schema.target] if schema.kind in (REAL, COUNT) else []
    held += [schema.weight] if schema.weight else []
    for name in held:
        for row, cell in enumerate(table.columns.get(name, [])):
            if "." in cell and _LIKE_A_NUMBER.fullmatch(cell):
                raise _with_point(table, row, name, 'the schema says decimal: ","')
    return with_points(table)


def with_points(table: CsvTable) -> CsvTable:
    """The table with a point in place of each decimal comma."""
    columns = {
        name: [cell.replace(",", ".") if "," in cell and _WITH_COMMA.fullmatch(cell) else cell for cell in cells]
        for name, cells in table.columns.items()
    }
    return replace(table, columns=columns)

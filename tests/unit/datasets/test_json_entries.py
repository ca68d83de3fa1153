"""Large JSON files, entry by entry."""

import json
from collections import Counter

import pytest

from distdl.datasets import json_entries


def test_entries_of_a_large_file_are_found_in_little_memory(tmp_path, monkeypatch):
    """Whatever the size of what is read at once; the places are those of the bytes."""
    value = {"info": {"year": 2017}, "images": [{"name": 'é\\"', "n": [1, 2]}, 12, "x"], "e": []}
    path = tmp_path / "file.json"
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        path.write_text(f"{text}\n", encoding="utf-8")
        for piece in (1, 7, 1 << 20):
            monkeypatch.setattr(json_entries, "PIECE", piece)
            with path.open("rb") as file:
                found = list(json_entries.entries(file))
            data = path.read_bytes()
            read = [json.loads(data[e.offset :][: e.length]) for e in found if e.length]
            assert read == [value["info"], *value["images"]]
            assert Counter(e.key for e in found if not e.length) == {"images": 1, "e": 1}
    monkeypatch.setattr(json_entries, "PIECE", 1 << 10)
    monkeypatch.setattr(json_entries, "MOST", 1 << 12)
    path.write_text('{"images": ["' + "x" * 20_000 + '"]}')
    with path.open("rb") as file, pytest.raises(ValueError, match="more than"):
        list(json_entries.entries(file))

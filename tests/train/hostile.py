"""Content of hostile files: any JSON, and JSON that was whole but for one to three of its places."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MANY = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(MANY, max_examples=40)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["../../x", "/etc/passwd", "\0", "rank-00000.safetensors", "F32", "O", "a\nb"]),
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def is_one_line(error):
    assert "\n" not in str(error).strip() and str(error)


def leaves(value, path=()):
    """The places in a JSON value, its own first."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from leaves(inner, (*path, key))


def with_leaf(value, path, new):
    """A copy of a JSON value that has `new` at a place, or lacks it (`...`)."""
    if not path:
        return {} if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = with_leaf(value[path[0]], path[1:], new)
    return copy


def spoilt(value):
    """A JSON value with one to three of its places changed, or left out."""

    @st.composite
    def draw(pick):
        found = value
        for _ in range(pick(st.integers(1, 3))):
            if isinstance(found, (dict, list)):
                places = list(leaves(found))
                found = with_leaf(found, pick(st.sampled_from(places)), pick(JSON | st.just(...)))
        return found

    return draw()


def bent(value):
    """A JSON value with one to three of its places replaced by others of the same kind: most of it is read."""

    @st.composite
    def draw(pick):
        found = value
        for _ in range(pick(st.integers(1, 3))):
            places = [path for path in leaves(found) if path]
            path = pick(st.sampled_from(places))
            there = found
            for key in path:
                there = there[key]
            found = with_leaf(found, path, pick(_alike(there)))
        return found

    return draw()


def _alike(value):
    match value:
        case bool():
            return st.booleans()
        case int():
            return st.sampled_from([-1, 0, 1, 3, 70_000, 2**31, 2**32 - 1, 2**64])
        case float():
            return st.sampled_from([-1e308, 0.0, 1.5]) | st.floats()
        case str():
            return st.sampled_from(["", "a", "##b", "<0x41>", "[UNK]", "(", "A", "ByteLevel", "\ud800"]) | st.text(
                max_size=3
            )
        case list():
            return st.sampled_from([[], value[1:], value + value])
        case dict():
            return st.sampled_from([{}, dict(list(value.items())[1:])])
    return st.sampled_from([0, True, "a", [], {}])

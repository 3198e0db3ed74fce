"""What readers of XML share: the root of a document, and attributes that are whole numbers."""

from xml.etree import ElementTree

from meshmend.errors import InputError


def xml_root(text: str) -> ElementTree.Element:
    """Return the root of an XML document.

    Raises:
        InputError: it is no XML.
    """
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(f"an allreduce to import needs to be XML, but: {error}") from None


def whole_number(element: ElementTree.Element, name: str, default: int | None = None) -> int:
    """Return an attribute that is a whole number.

    Raises:
        InputError: it is no such number, or it is absent and has no default.
    """
    word = element.get(name)
    try:
        return default if word is None and default is not None else int(str(word))
    except ValueError:
        raise InputError(f"<{element.tag}> needs a whole number {name}, but got {word!r}") from None

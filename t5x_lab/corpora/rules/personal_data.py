"""Masking of personal data, as FineWeb (Penedo et al., 2024) and Dolma (Soldaini et al., 2024) do it."""

import dataclasses
import ipaddress
import re

from t5x_lab.corpora.page import Page

_LOCAL = r"A-Za-z0-9!#$%&'*+/?^_`{|}~=.-"  # characters before the @
_EMAIL = re.compile(rf"(?<![{_LOCAL}])[{_LOCAL}]{{1,64}}@(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}[A-Za-z]{{2,24}}\b")
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\d.])(?:{_OCTET}\.){{3}}{_OCTET}(?![\d.]*\d)")
_PHONE = re.compile(r"(?<![\w.])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)|\d{3})[ .-]\d{3,4}[ .-]\d{4}(?!\w)")


def personal_data(page: Page, email: str = "email@example.com", ip: str = "22.214.171.124", phone: str = "") -> Page:
    """Replaces e-mail addresses, public IPv4 addresses and telephone numbers.

    Args:
      page: the page.
      email, ip, phone: replacements; "" = unchanged. Telephone numbers are those of North America's format.
    """
    text = page.text
    if email and "@" in text:
        text = _EMAIL.sub(email, text)
    if ip:
        text = _IPV4.sub(lambda match: ip if ipaddress.ip_address(match[0]).is_global else match[0], text)
    if phone:
        text = _PHONE.sub(phone, text)
    return page if text == page.text else dataclasses.replace(page, text=text)

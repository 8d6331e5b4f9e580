"""The dashboard as it is served: headers, addresses, what is in its files. (In a browser: test_dashboard_in_chromium.)"""

import gzip
import re
from collections.abc import Iterator

import httpx
import pytest

from coordinator.dashboard import serving
from harness.coordinator import InThread
from tests.coordinator.crew import problem

FILES = sorted(serving.page_files())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


@pytest.fixture(scope="module")
def http(shared: InThread) -> Iterator[httpx.Client]:
    """Somebody without a token."""
    with shared.client() as client:
        del client.headers["Authorization"]
        yield client


def page(http: httpx.Client) -> str:
    return http.get("/", headers={"Accept": "text/html"}).raise_for_status().text


def addresses(text: str) -> list[str]:
    return re.findall(r'(?:href|src|data-charts)="([^#"]+)"', text)


def test_the_page_needs_no_token_and_has_nothing_of_a_run(shared: InThread, http: httpx.Client, run: str) -> None:
    reply = http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert shared.admin_token not in reply.text
    assert "{" not in reply.text, "an address that was not filled in"


@pytest.mark.slow
@pytest.mark.covers("security:dashboard-assets")
def test_it_loads_from_here_alone_and_all_that_it_names_is_there(http: httpx.Client) -> None:
    named = addresses(page(http))
    assert len(named) == len(FILES) - 1 + 2  # the page itself is not; main.js is named twice, and there are the charts
    for address in named:
        assert not re.match(r"[a-z]+:|//|/", address), f"{address} is not below the page's own address"
        reply = http.get(f"/{address}")
        assert reply.status_code == 200, address
        assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_server(name: str) -> None:
    text = serving.page_files()[name].decode()
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}  # a name, which nobody asks
    assert not re.search(r"@import|url\(", text)


@pytest.mark.covers("security:script-injection")
@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_html_or_code_of_text(name: str) -> None:
    text = serving.page_files()[name].decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", text)


def test_no_script_or_style_stands_in_the_page(http: httpx.Client) -> None:
    text = page(http)
    assert re.findall(r"<script\b[^>]*>([^<]*)", text) == [""]
    assert not re.search(r"<style|\son\w+=|\sstyle=|javascript:", text)


@pytest.mark.covers("security:dashboard-assets")
@pytest.mark.parametrize("address", ["/", "charts", "main.js"])
def test_what_a_browser_may_do_with_it(http: httpx.Client, address: str) -> None:
    path = {"charts": f"/dashboard/{serving.charts_path()}", "main.js": f"/dashboard/{serving.version()}/main.js"}
    headers = http.get(path.get(address, address)).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-request-id"]


@pytest.mark.parametrize("name", ["main.js", "base.css", "charts"])
def test_it_travels_compressed_to_whoever_takes_that(http: httpx.Client, name: str) -> None:
    path = f"/dashboard/{serving.charts_path() if name == 'charts' else f'{serving.version()}/{name}'}"
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with http.stream("GET", path, headers={"Accept-Encoding": "br, gzip"}) as reply:
        sent = b"".join(reply.iter_raw())
    assert reply.headers["content-encoding"] == "gzip"
    assert gzip.decompress(sent) == plain.content
    assert len(sent) < 0.6 * len(plain.content)
    assert "Accept-Encoding" in reply.headers["vary"]
    assert "content-encoding" not in http.get(path, headers={"Accept-Encoding": "gzip;q=0, br"}).headers


def test_what_a_browser_has_it_does_not_get_again(http: httpx.Client) -> None:
    for path in ("/", f"/dashboard/{serving.version()}/main.js"):
        tag = http.get(path).headers["etag"]
        again = http.get(path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get(path, headers={"If-None-Match": '"another"'}).status_code == 200


def test_a_rest_client_gets_a_problem_for_an_unknown_address(http: httpx.Client) -> None:
    assert "/docs" in problem(http.get("/", headers={"Accept": "application/json"}), "not-found")["detail"]


@pytest.mark.parametrize(
    "path",
    ["index.html", "{version}/index.html", "{version}/../serving.py", "{version}/%2e%2e/serving.py", "x/main.js"],
)
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    problem(http.get("/dashboard/" + path.format(version=serving.version())), "not-found")

"""In which region a bucket of Amazon S3 is. The service says so to anybody, whatever else it answers."""

import ssl
import urllib.error
import urllib.request

from milepost.store.cloud.options import CloudOptions

HEADER = "x-amz-bucket-region"
TIMEOUT_S = 5.0


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: object) -> None:
        """Follow no redirect: what it says is the answer."""


def find_region(bucket: str, options: CloudOptions, service: str = "https://s3.amazonaws.com") -> str | None:
    """The region of a bucket, by one request without credentials. None if nobody says."""
    handlers: list[urllib.request.BaseHandler] = [_Stay()]
    try:
        trusted = ssl.create_default_context()
        if options.ca_file is not None:
            trusted.load_verify_locations(options.ca_file)
        handlers.append(urllib.request.HTTPSHandler(context=trusted))
        if options.proxy is not None:
            handlers.append(urllib.request.ProxyHandler({"http": options.proxy, "https": options.proxy}))
        request = urllib.request.Request(f"{service}/{bucket}", method="HEAD")  # noqa: S310  # a URL of ours
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as reply:
            return reply.headers.get(HEADER) or None
    except urllib.error.HTTPError as error:
        with error:
            return error.headers.get(HEADER) or None
    except (OSError, ValueError):  # not reached: requests will tell
        return None

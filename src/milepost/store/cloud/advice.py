"""What to do about a refusal, in one sentence or two."""

from milepost.store.cloud.options import CloudOptions
from milepost.store.cloud.replies import Refusal, Why
from milepost.store.cloud.url import Bucket

_PERMISSIONS = {
    "s3": {"get": "s3:GetObject", "put": "s3:PutObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
    "gs": {
        "get": "storage.objects.get",
        "put": "storage.objects.create",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": {
        "get": "blobs/read (role Storage Blob Data Reader)",
        "put": "blobs/write (role Storage Blob Data Contributor)",
        "list": "blobs/read (role Storage Blob Data Reader)",
        "delete": "blobs/delete (role Storage Blob Data Contributor)",
    },
}
_SOURCES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, run `az login`, or give the machine an identity",
}
_FIXED = {
    Why.CLOCK: "The clock of this machine is wrong by more than a few minutes: set it (NTP).",
    Why.CONFLICT: "Other requests for the same name were under way all the time; try again.",
    Why.THROTTLED: "The service is asked too much: use fewer requests at once (CloudOptions.requests), or try later.",
    Why.BUSY: "The service has trouble of its own; try again.",
    Why.DAMAGED: "Something on the way to the service changes or cuts what is sent: look at proxies and the network.",
    Why.SHORT: "The object is shorter.",
    Why.ABSENT: "It is not there.",
}


def advice(refusal: Refusal, verb: str, place: Bucket, options: CloudOptions, endpoint: str | None) -> str:
    """What the user does next. `endpoint`: the service that was asked, if it is not the provider's own."""
    bucket = "container" if place.provider == "az" else "bucket"
    needed = _PERMISSIONS[place.provider][verb]
    where = f"the endpoint {endpoint}" if endpoint else f"the endpoint of {place.scheme}://"
    reach = f"Is {where} right, and can this machine reach it (network, proxy, firewall)?"
    if needed == "s3:GetObject":
        needed += " (and s3:ListBucket, or absent objects look forbidden)"
    found = {
        Why.DENIED: f"The credentials may not do this: they need {needed} on this {bucket}.",
        Why.NO_BUCKET: f"There is no {bucket} {place.bucket!r}: create it, or correct the URL.",
        Why.NO_CREDENTIALS: f"Pass CloudOptions, {_SOURCES[place.provider]}.",
        Why.BAD_CREDENTIALS: f"The credentials are wrong: correct them ({_SOURCES[place.provider]}).",
        Why.EXPIRED: "The credentials have expired or are not accepted, also when they are fetched again: renew them.",
        Why.REGION: f"The bucket is in another region than {options.region or 'the one that is set'}: pass its own as "
        "CloudOptions.region, AWS_REGION or ?region=...",
        Why.UNREACHABLE: reach,
        Why.LATE: reach,
        Why.UNANSWERED: reach,
        Why.UNTRUSTED: f"If {where} is right, pass its certificate authority as ca_file.",
    }
    return found.get(refusal.why) or _FIXED.get(refusal.why) or "Asking again does not help."

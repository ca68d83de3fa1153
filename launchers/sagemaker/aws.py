"""boto3 clients, and readable messages for boto3's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdl.util.errors import NoRight, NotSignedIn, UserError

if TYPE_CHECKING:
    from botocore.client import BaseClient

SIGN_IN = "aws configure, aws sso login, AWS_PROFILE=NAME or launcher.profile=NAME"
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
# Errors of botocore -> the setting that the error is about, the remedy, and the refusal's code.
ABOUT = {
    "ProfileNotFound": ("launcher.profile", "aws configure list-profiles", "not-found"),
    "NoRegionError": ("launcher.region", "launcher.region=eu-west-1", "missing-key"),
    "EndpointConnectionError": ("launcher.region", "is the region right?", "unreachable"),
}
# AWS's codes, which do not all come with a status of 401 or 403.
REFUSALS = {
    **dict.fromkeys(("ExpiredTokenException", "UnrecognizedClientException"), NotSignedIn),
    **dict.fromkeys(("ExpiredToken", "InvalidClientTokenId", "InvalidAccessKeyId"), NotSignedIn),
    **dict.fromkeys(("SignatureDoesNotMatch", "InvalidSignatureException"), NotSignedIn),
    "AccessDeniedException": NoRight,
}
# By default a client waits 60 s for a connection and 60 s for an answer, five times each: a user
# would wait for minutes to read that AWS does not answer.
TRIES, CONNECT_S, READ_S = 3, 5, 10
READ_S_OF = {"s3": 20, "sagemaker-runtime": 70}  # files; a model may compute for 60 s


@dataclass
class Aws:
    """Clients of one account and region, created at their first use. If region or profile is None,
    AWS's own variables and files decide."""

    region: str | None = None
    profile: str | None = None
    clients: dict[str, BaseClient] = field(default_factory=dict)

    def __call__(self, service: str) -> BaseClient:
        if service not in self.clients:
            with aws_errors():
                self.clients[service] = client(service, self.region, self.profile)
        return self.clients[service]

    def resolved_region(self) -> str:
        return self.region or str(self("sagemaker").meta.region_name)


def client(service: str, region: str | None, profile: str | None = None) -> BaseClient:
    """A boto3 client that gives up early. So do the clients with which boto3 itself signs in."""
    import boto3
    from botocore.config import Config
    from botocore.session import Session

    session = Session(profile=profile)
    defaults = Config(
        retries={"mode": "standard", "total_max_attempts": TRIES},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
    )
    session.set_default_client_config(defaults)
    config = Config(read_timeout=READ_S_OF.get(service, READ_S))
    return boto3.Session(region_name=region, botocore_session=session).client(
        service, config=config
    )


def code_of(error: Exception) -> str:
    """AWS's error code, such as ResourceInUse; empty for a network error."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextmanager
def aws_errors() -> Iterator[None]:
    """Turns boto3's errors into UserErrors, since the user can fix them."""
    try:
        import boto3  # noqa: F401
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    except ImportError:
        raise UserError.at(
            "launcher",
            what="boto3 is not installed",
            remedy="pip install 'distdl[sagemaker]'",
            code="not-installed",
        ) from None
    try:
        yield
    except ClientError as error:
        what = f"{code_of(error)}: {error.response['Error'].get('Message', '')}"
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        other = {401: NotSignedIn, 403: NoRight}.get(status, UserError)
        kind = REFUSALS.get(code_of(error), other)
        refused = f"AWS refuses {error.operation_name}. {what}"
        raise kind.at("launcher", refused, code="platform-refuses") from None
    except (BotoCoreError, Boto3Error) as error:
        name = type(error).__name__
        if name in NO_CREDENTIALS:
            raise NotSignedIn.at(
                "launcher", what=f"no AWS credentials: {error}", remedy=SIGN_IN
            ) from None
        unknown = "unreachable" if isinstance(error, HTTPClientError) else "failed"
        path, remedy, code = ABOUT.get(name, ("launcher", "", unknown))
        raise UserError.at(path, what=f"AWS: {error}", remedy=remedy, code=code) from None

"""boto3, and what its errors mean to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distdl.errors import Problem, UserError


@dataclass
class Aws:
    """Clients of one account and region, made when they are first used.

    Args:
        region, profile: None leaves it to AWS's own variables and files.
    """

    region: str | None = None
    profile: str | None = None
    clients: dict[str, Any] = field(default_factory=dict)

    def __call__(self, service: str) -> Any:
        """The client of a service.

        Raises:
            UserError: boto3 is not installed, or region or profile cannot be told.
        """
        if service not in self.clients:
            with explained():
                self.clients[service] = self._session().client(service)
        return self.clients[service]

    def _session(self) -> Any:
        try:
            import boto3
        except ImportError:
            raise UserError(
                Problem("launcher", "boto3 is not installed", "pip install 'distdl[sagemaker]'")
            ) from None
        return boto3.Session(region_name=self.region, profile_name=self.profile)

    def found_region(self) -> str:
        """The region that calls go to."""
        return str(self("sagemaker").meta.region_name)


def code_of(error: Exception) -> str:
    """AWS's own word for an error, such as ResourceInUse; empty for one of the network."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextmanager
def explained() -> Iterator[None]:
    """Whatever AWS refuses is the user's to mend: said as a Problem, without a traceback."""
    from_boto: type[Exception] = Exception
    try:
        from boto3.exceptions import Boto3Error
        from botocore import exceptions as boto
    except ImportError:  # `Aws` says it better
        yield
        return
    from_boto = boto.BotoCoreError
    try:
        yield
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.TokenRetrievalError) as e:
        what = f"no AWS credentials: {e}"
        remedy = "aws configure, aws sso login, or set AWS_PROFILE; launcher.profile names one"
        raise UserError(Problem("launcher", what, remedy)) from None
    except boto.ProfileNotFound as e:
        raise UserError(
            Problem("launcher.profile", str(e), "aws configure list-profiles")
        ) from None
    except boto.NoRegionError:
        what = "no AWS region is set"
        raise UserError(Problem("launcher.region", what, "launcher.region=eu-west-1")) from None
    except boto.EndpointConnectionError as e:
        raise UserError(Problem("launcher.region", str(e), "is the region right?")) from None
    except boto.ClientError as e:
        what = f"{code_of(e)}: {e.response['Error'].get('Message', '')}"
        raise UserError(Problem("launcher", f"AWS refuses {e.operation_name}. {what}")) from None
    except (from_boto, Boto3Error) as e:
        raise UserError(Problem("launcher", f"AWS: {e}")) from None

"""What a worker calls of the doctor: `distdl.worker.named_tools.Examiner`."""

from distdl.tools.doctor.examination import examine, record_transport
from distdl.tools.doctor.reach import rendezvous

__all__ = ["examine", "record_transport", "rendezvous"]

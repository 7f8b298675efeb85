"""A Java virtual machine that holds the engines of many sessions. Runs inside a supervised process."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crest_train.environments.supervised import ProcessLost

OPTIONS = ["-XX:+UseSerialGC", "-Xmx2g", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
"""One thread collects garbage; at most 2 GiB of heap; equal identity hashes, so that the engines' hash sets keep one
order in every process and every session is told in the same words."""


def check_java() -> None:
    """Raises ValueError with the command that brings Java, where there is none."""
    if shutil.which("java") is None:
        raise ValueError("Java was not found; it comes with: apt-get install default-jre-headless")


class Jvm:
    """The machine that runs a jar. Its methods raise ProcessLost when it is gone."""

    def __init__(self, jar: Path):
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        # Its reports of a broken connection, which is answered here, go to the root logger too.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(lambda record: record.module != "java_gateway")
        port, self.process = launch_gateway(
            classpath=str(jar), javaopts=OPTIONS, die_on_exit=True, cwd=str(jar.parent), return_proc=True
        )
        parameters = GatewayParameters(auto_field=True, port=port, enable_memory_management=False)
        self.gateway = JavaGateway(gateway_parameters=parameters)

    def new(self, name: str) -> Any:
        """A new object of the Java class with the full name."""
        with _told():
            java_class = self.gateway.jvm
            for part in name.split("."):
                java_class = getattr(java_class, part)
            return java_class()

    def call(self, target: Any, method: str, *args: Any) -> Any:
        """What a method of an object gives: a number, a text, True or False; a list as a tuple of its texts.

        Raises RuntimeError with the first line of what Java threw.
        """
        from py4j.java_collections import JavaArray, JavaList
        from py4j.protocol import Py4JJavaError

        with _told():
            try:
                found = getattr(target, method)(*args)  # to look the method up asks the machine, too
                if isinstance(found, JavaArray | JavaList):
                    texts = tuple(found)
                    self.gateway.detach(found)
                    return texts
                return found
            except Py4JJavaError as error:
                thrown = str(error.java_exception.toString()).splitlines()[0]
                self.gateway.detach(error.java_exception)
                raise RuntimeError(thrown) from None


@contextmanager
def _told() -> Iterator[None]:
    """Whatever breaks between Python and the machine is a ProcessLost."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, OSError) as error:
        raise ProcessLost(str(error)) from error

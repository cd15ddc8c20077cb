"""Kubernetes: how its API is reached, and what it says when it cannot do what was asked."""

from __future__ import annotations

import os
from typing import Any


class NoAccess(Exception):
    """The client is not installed, or nothing says where there is a cluster. The message says what to do."""


def connect() -> Any:
    """A ``kubernetes.client.ApiClient``, by the pod's service account or else ``KUBECONFIG`` or ``~/.kube/config``.

    It does not repeat requests: who asks knows whether that is right. Raises NoAccess.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise NoAccess(f"its client is missing: pip install 'megatron-elastic[kubernetes]' ({error})") from None
    configuration = client.Configuration()
    configuration.proxy = None  # the environment's is for the world outside; a kubeconfig may name one
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            # The client reads the variable once, when it is imported.
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration)
    except config.ConfigException as error:
        raise NoAccess(f"no access to a cluster ({error}); run in a pod with a service account, or set KUBECONFIG"
                       ) from None  # fmt: skip
    configuration.retries = False
    return client.ApiClient(configuration)

"""Programs that a policy wrote, run with limits in namespaces of their own or in containers."""

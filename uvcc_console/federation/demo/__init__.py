"""The whole federated story on one machine: three domains, two data owners, a relay and an auditor, each by itself."""

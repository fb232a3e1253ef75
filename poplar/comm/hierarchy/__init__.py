"""The transport across hosts: values are added on each host before they are sent on."""

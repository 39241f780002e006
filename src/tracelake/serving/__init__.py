"""HTTP as the platform's services speak it: declared routes, checked credentials, strict requests, problem details.

Shared by the Dispatcher and the Query Service; which routes and which credentials there are is theirs.
"""

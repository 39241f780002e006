"""``make attack``: hostile operators, functions, SQL, DAG files and neighbours against a running stack.

    attack.py         the definition of an attack, and the table of outcomes
    stack.py          the stack, its victims, and ways to run hostile code on it
    hostile.py        the operators that run it, in the workers
    operators.py      trusted with their inputs and staging places, and with nothing else
    functions.py      trusted with nothing
    sql.py            SELECTs for sql_transform and for the Query Service
    dags.py           DAG files, triggers and bundles of an owner of a user token
    http.py           clients that reach a port, without a valid credential
    neighbours.py     processes of other users of the machine
    installation.py   a second Dispatcher, folders and sizes that people choose

Each attack is carried through to its effect: the row that changed, the file that was read, the request that wasn't
answered. It returns ``held`` with the refusal, or ``broken`` with what it reached.
"""

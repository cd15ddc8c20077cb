/* transformer_engine_torch, as Transformer Engine's loader wants it: a shared object. What is in it is Python's
 * (library.py). */

#include <Python.h>

static int execute(PyObject *module) {
    PyObject *python = PyImport_ImportModule("software_engine.library");
    if (python == NULL) return -1;
    PyObject *done = PyObject_CallMethod(python, "fill", "O", module);
    Py_DECREF(python);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "transformer_engine_torch", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_transformer_engine_torch(void) { return PyModuleDef_Init(&definition); }

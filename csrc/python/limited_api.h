// SPDX-License-Identifier: Apache-2.0
// The limited API has functions for what are macros in the full API. Include it after Python.h.
// With it, one build serves all versions of Python from 3.12 on. Other builds are not changed.
#pragma once

#include <nanobind/nanobind.h>

#ifdef Py_LIMITED_API
#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_SET_ITEM PyList_SetItem
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_SET_ITEM PyTuple_SetItem
#endif

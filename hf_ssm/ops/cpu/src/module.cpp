// The Python module: tensors come in through PyTorch's DLPack exchange table, so nothing here depends on torch's ABI,
// and only Python's stable one is used: one build serves every version of both.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

#include "kernels.h"
#include "parallel.h"

namespace hf_ssm {
namespace {

// --- DLPack, as far as it is used (version 1: github.com/dmlc/dlpack, dlpack.h) ---

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t vector_lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  void* previous;
  void *allocate, *from_python, *to_python;
  int (*view_of)(void* object, DLTensor* view);
  void* current_stream;
};

constexpr int32_t on_cpu = 1;
constexpr uint8_t code_float = 2, code_bfloat = 4, code_bool = 6;

const DLExchange* exchange = nullptr;
const Kernels* kernels = &kernels_plain;

// --- arguments ---

struct PythonError {};  // Python's error is set

class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : next_(values), end_(values + count) {}

  Tensor tensor() {
    PyObject* object = take();
    if (object == Py_None) return {};
    DLTensor view;
    if (!exchange || exchange->view_of(object, &view) != 0) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the module was not set up with a tensor type");
      throw PythonError();
    }
    Tensor tensor;
    tensor.data = static_cast<char*>(view.data) + view.byte_offset;
    tensor.shape = view.shape;
    tensor.strides = view.strides;
    tensor.ndim = view.ndim;
    if (view.device_type != on_cpu) fail("expected tensors on the CPU");
    if (view.code == code_float && view.bits == 32)
      tensor.dtype = Dtype::float32;
    else if (view.code == code_float && view.bits == 16)
      tensor.dtype = Dtype::float16;
    else if (view.code == code_bfloat && view.bits == 16)
      tensor.dtype = Dtype::bfloat16;
    else if (view.code == code_bool && view.bits == 8)
      tensor.dtype = Dtype::boolean;
    else
      fail("expected tensors of float32, bfloat16, float16 or bool");
    static char nothing;  // an empty tensor is not a missing one
    if (!tensor.data) tensor.data = &nothing;
    return tensor;
  }

  bool flag() { return integer() != 0; }

  int64_t integer() {
    int64_t value = PyLong_AsLongLong(take());
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }

  float number() {
    double value = PyFloat_AsDouble(take());
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return float(value);
  }

  void end() const {
    if (next_ != end_) fail("too many arguments");
  }

  [[noreturn]] static void fail(const char* message) {
    PyErr_SetString(PyExc_TypeError, message);
    throw PythonError();
  }

 private:
  PyObject* take() {
    if (next_ == end_) fail("too few arguments");
    return *next_++;
  }

  PyObject* const* next_;
  PyObject* const* end_;
};

// A kernel as a Python function: `read` fills its call from the arguments, of which the last is the number of threads.
template <class Call, void (*const Kernels::*kernel)(const Call&, int), void (*read)(Call&, Arguments&)>
PyObject* run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  try {
    Arguments arguments(values, count);
    Call call{};
    read(call, arguments);
    int threads = int(arguments.integer());
    arguments.end();
    PyThreadState* state = PyEval_SaveThread();
    bool enough_memory = true;
    try {
      (kernels->*kernel)(call, threads);
    } catch (const std::bad_alloc&) {
      enough_memory = false;
    }
    PyEval_RestoreThread(state);
    if (!enough_memory) return PyErr_NoMemory();
    Py_RETURN_NONE;
  } catch (const PythonError&) {
    return nullptr;
  }
}

void read(SelectiveScan& call, Arguments& arguments) {
  for (Tensor* tensor : {&call.x, &call.dt, &call.A, &call.B, &call.C, &call.D, &call.z, &call.dt_bias})
    *tensor = arguments.tensor();
  call.dt_softplus = arguments.flag();
  for (Tensor* tensor : {&call.starts, &call.initial_state, &call.out, &call.final_state, &call.checkpoints})
    *tensor = arguments.tensor();
}

void read(SelectiveScanBackward& call, Arguments& arguments) {
  read(call.forward, arguments);
  for (Tensor* tensor : {&call.x, &call.dt, &call.A, &call.B, &call.C, &call.D, &call.z, &call.dt_bias,
                         &call.initial_state})
    *tensor = arguments.tensor();
}

void read(Linear& call, Arguments& arguments) {
  for (Tensor* tensor : {&call.x, &call.weight, &call.bias, &call.out}) *tensor = arguments.tensor();
}

void read(Conv1d& call, Arguments& arguments) {
  for (Tensor* tensor : {&call.x, &call.weight, &call.bias, &call.initial_state, &call.starts})
    *tensor = arguments.tensor();
  call.silu = arguments.flag();
  call.ahead = arguments.integer();
  call.out = arguments.tensor();
}

void read(Conv1dBackward& call, Arguments& arguments) {
  read(call.forward, arguments);
  for (Tensor* tensor : {&call.x, &call.weight, &call.bias, &call.initial_state}) *tensor = arguments.tensor();
}

void read(SsdScan& scan, Arguments& arguments) {
  for (Tensor* tensor : {&scan.x, &scan.dt, &scan.A, &scan.B, &scan.C, &scan.dt_bias}) *tensor = arguments.tensor();
  scan.dt_softplus = arguments.flag();
  scan.dt_min = arguments.number();
  scan.dt_max = arguments.number();
  scan.starts = arguments.tensor();
}

void read(Ssd& call, Arguments& arguments) {
  read(call.scan, arguments);
  for (Tensor* tensor : {&call.D, &call.z, &call.initial_state, &call.out, &call.final_state, &call.checkpoints})
    *tensor = arguments.tensor();
}

void read(SsdScanGradients& scan, Arguments& arguments) {
  for (Tensor* tensor : {&scan.dt, &scan.A, &scan.B, &scan.C, &scan.dt_bias}) *tensor = arguments.tensor();
}

void read(SsdBackward& call, Arguments& arguments) {
  read(call.forward, arguments);
  read(call.scan, arguments);
  for (Tensor* tensor : {&call.x, &call.D, &call.z, &call.initial_state}) *tensor = arguments.tensor();
}

void read(Quasiseparable& call, Arguments& arguments) {
  SsdScan &forward = call.forward, &backward = call.backward;
  for (Tensor* tensor : {&forward.x, &forward.dt, &backward.dt, &forward.A, &forward.B, &forward.C, &backward.B,
                         &backward.C, &call.diagonal, &forward.starts, &call.out, &call.before, &call.behind})
    *tensor = arguments.tensor();
  backward.x = forward.x;
  backward.A = forward.A;
  backward.starts = forward.starts;
  forward.dt_min = backward.dt_min = -__builtin_inff();
  forward.dt_max = backward.dt_max = __builtin_inff();
}

void read(QuasiseparableBackward& call, Arguments& arguments) {
  read(call.forward, arguments);
  SsdScanGradients &forward = call.scan_forward, &backward = call.scan_backward;
  for (Tensor* tensor : {&call.x, &forward.dt, &backward.dt, &forward.A, &forward.B, &forward.C, &backward.B,
                         &backward.C, &call.diagonal})
    *tensor = arguments.tensor();
  backward.A = forward.A;
}

void read(RmsNorm& call, Arguments& arguments) {
  for (Tensor* tensor : {&call.x, &call.weight, &call.gate}) *tensor = arguments.tensor();
  call.group_size = arguments.integer();
  call.norm_before_gate = arguments.flag();
  call.eps = arguments.number();
  call.out = arguments.tensor();
}

void read(RmsNormBackward& call, Arguments& arguments) {
  read(call.forward, arguments);
  for (Tensor* tensor : {&call.x, &call.weight, &call.gate}) *tensor = arguments.tensor();
}

// --- set-up ---

const Kernels* const tables[] = {
#if defined(__x86_64__)
    &kernels_avx512,
    &kernels_avx2,
#endif
    &kernels_plain,
};

bool machine_has(const Kernels* table) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (table == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  if (table == &kernels_avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and with AVX2 comes F16C
#endif
  return true;
}

const char* entry_point = nullptr;

// set_up(tensor_type, path of the library whose thread pool to use)
PyObject* set_up(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "set_up takes a tensor type and a path");
    return nullptr;
  }
  PyObject* capsule = PyObject_GetAttrString(values[0], "__dlpack_c_exchange_api__");
  if (!capsule) return nullptr;
  auto* table = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (!table) return nullptr;
  while (table && table->major != 1) table = static_cast<const DLExchange*>(table->previous);
  if (!table || !table->view_of) {
    PyErr_SetString(PyExc_RuntimeError, "this torch offers no DLPack exchange of version 1");
    return nullptr;
  }
  PyObject* path = PyUnicode_AsUTF8String(values[1]);
  if (!path) return nullptr;
  exchange = table;
  entry_point = find_pool(PyBytes_AsString(path));
  Py_DECREF(path);
  Py_RETURN_NONE;
}

// The entry point of the thread pool that is used, None if there is none.
PyObject* pool(PyObject*, PyObject*) {
  if (!entry_point) Py_RETURN_NONE;
  return PyUnicode_FromString(entry_point);
}

// use(name) -> None: take the kernels of an instruction set; ValueError if there are none or the machine lacks it
PyObject* use(PyObject*, PyObject* name) {
  PyObject* text = PyUnicode_AsUTF8String(name);
  if (!text) return nullptr;
  const Kernels* found = nullptr;
  for (const Kernels* table : tables)
    if (std::strcmp(table->name, PyBytes_AsString(text)) == 0 && machine_has(table)) found = table;
  Py_DECREF(text);
  if (!found) return PyErr_Format(PyExc_ValueError, "this machine has no kernels named %R", name);
  kernels = found;
  Py_RETURN_NONE;
}

PyObject* in_use(PyObject*, PyObject*) { return PyUnicode_FromString(kernels->name); }

// The names of the instruction sets that this build and this machine have, best first.
PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* table : tables) {
    if (!names || !machine_has(table)) continue;
    PyObject* name = PyUnicode_FromString(table->name);
    if (!name || PyList_Append(names, name) != 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"set_up", as_method(set_up), METH_FASTCALL, nullptr},
    {"pool", pool, METH_NOARGS, nullptr},
    {"use", use, METH_O, nullptr},
    {"in_use", in_use, METH_NOARGS, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"selective_scan", as_method(run<SelectiveScan, &Kernels::selective_scan, read>), METH_FASTCALL, nullptr},
    {"selective_scan_backward", as_method(run<SelectiveScanBackward, &Kernels::selective_scan_backward, read>),
     METH_FASTCALL, nullptr},
    {"linear", as_method(run<Linear, &Kernels::linear, read>), METH_FASTCALL, nullptr},
    {"conv1d", as_method(run<Conv1d, &Kernels::conv1d, read>), METH_FASTCALL, nullptr},
    {"conv1d_backward", as_method(run<Conv1dBackward, &Kernels::conv1d_backward, read>), METH_FASTCALL, nullptr},
    {"ssd", as_method(run<Ssd, &Kernels::ssd, read>), METH_FASTCALL, nullptr},
    {"ssd_backward", as_method(run<SsdBackward, &Kernels::ssd_backward, read>), METH_FASTCALL, nullptr},
    {"quasiseparable", as_method(run<Quasiseparable, &Kernels::quasiseparable, read>), METH_FASTCALL, nullptr},
    {"quasiseparable_backward", as_method(run<QuasiseparableBackward, &Kernels::quasiseparable_backward, read>),
     METH_FASTCALL, nullptr},
    {"rms_norm", as_method(run<RmsNorm, &Kernels::rms_norm, read>), METH_FASTCALL, nullptr},
    {"rms_norm_backward", as_method(run<RmsNormBackward, &Kernels::rms_norm_backward, read>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Native CPU kernels; hf_ssm.ops.cpu calls them.", -1, methods,
    nullptr,               nullptr,   nullptr,                                          nullptr,
};

}  // namespace
}  // namespace hf_ssm

PyMODINIT_FUNC PyInit__native() {
  for (const hf_ssm::Kernels* table : hf_ssm::tables)
    if (hf_ssm::machine_has(table)) {
      hf_ssm::kernels = table;
      break;
    }
  return PyModule_Create(&hf_ssm::definition);
}

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
PyObject *tensor_type = nullptr, *parameter_type = nullptr;
PyObject *new_empty = nullptr, *in_float32 = nullptr;  // a method's name, and {"dtype": torch.float32}
const Kernels* kernels = &kernels_plain;

// --- arguments ---

struct PythonError {};  // Python's error is set

bool view(PyObject* object, Tensor& tensor);

class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : next_(values), end_(values + count) {}

  Tensor tensor() {
    PyObject* object = take();
    Tensor tensor;
    if (object != Py_None && !view(object, tensor)) fail("expected tensors of float32, bfloat16, float16 or bool on the CPU");
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

  PyObject* take() {
    if (next_ == end_) fail("too few arguments");
    return *next_++;
  }

 private:
  PyObject* const* next_;
  PyObject* const* end_;
};

// False for a tensor that no kernel reads: on another device or of another dtype.
bool view(PyObject* object, Tensor& tensor) {
  DLTensor view;
  if (!exchange || exchange->view_of(object, &view) != 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the module was not set up with a tensor type");
    throw PythonError();
  }
  tensor.data = static_cast<char*>(view.data) + view.byte_offset;
  tensor.shape = view.shape;
  tensor.strides = view.strides;
  tensor.ndim = view.ndim;
  if (view.device_type != on_cpu) return false;
  if (view.code == code_float && view.bits == 32)
    tensor.dtype = Dtype::float32;
  else if (view.code == code_float && view.bits == 16)
    tensor.dtype = Dtype::float16;
  else if (view.code == code_bfloat && view.bits == 16)
    tensor.dtype = Dtype::bfloat16;
  else if (view.code == code_bool && view.bits == 8)
    tensor.dtype = Dtype::boolean;
  else
    return false;
  static char nothing;  // an empty tensor is not a missing one
  if (!tensor.data) tensor.data = &nothing;
  return true;
}

// Runs a kernel, with as many threads as the last of the arguments says, while other Python threads go on.
template <class Call, void (*const Kernels::*kernel)(const Call&, int)>
void compute(const Call& call, Arguments& arguments) {
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
  if (!enough_memory) {
    PyErr_NoMemory();
    throw PythonError();
  }
}

// A kernel as a Python function: `read` fills its call from the arguments, of which the last is the number of threads.
template <class Call, void (*const Kernels::*kernel)(const Call&, int), void (*read)(Call&, Arguments&)>
PyObject* run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  try {
    Arguments arguments(values, count);
    Call call{};
    read(call, arguments);
    compute<Call, kernel>(call, arguments);
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

// --- steps: a kernel that makes its results itself, for calls so short that Python's share of them counts ---
//
// A step returns None, and has done nothing, where a call is not of its kind: a tensor is of a subclass, on another
// device, of another dtype or shape. The ordinary way, which such a call then takes, knows what to make of it.

struct NotOfItsKind {};

void expect(bool condition) {
  if (!condition) throw NotOfItsKind();
}

class Step : public Arguments {
 public:
  using Arguments::Arguments;
  ~Step() {
    for (int i = 0; i < results_; ++i) Py_DECREF(result_[i]);
  }

  struct Argument : Tensor {
    PyObject* object = Py_None;
    bool is(std::initializer_list<int64_t> sizes) const {
      if (ndim != int(sizes.size())) return false;
      const int64_t* size = shape;
      for (int64_t wanted : sizes)
        if (*size++ != wanted) return false;
      return true;
    }
    bool is_dense_row(int axis = -1) const { return shape[axis < 0 ? ndim + axis : axis] == 1 || stride(axis) == 1; }
  };

  Argument optional() {
    Argument argument;
    argument.object = take();
    if (argument.object == Py_None) return argument;
    PyTypeObject* type = Py_TYPE(argument.object);
    expect(type == reinterpret_cast<PyTypeObject*>(tensor_type) ||
           type == reinterpret_cast<PyTypeObject*>(parameter_type));
    try {
      expect(view(argument.object, argument) && argument.dtype != Dtype::boolean);
    } catch (const PythonError&) {  // a tensor without memory, as those on the meta device
      PyErr_Clear();
      expect(false);
    }
    return argument;
  }

  Argument required() {
    Argument argument = optional();
    expect(bool(argument));
    return argument;
  }

  Argument optional(std::initializer_list<int64_t> sizes) {
    Argument argument = optional();
    expect(!argument || argument.is(sizes));
    return argument;
  }

  // The same memory with another shape.
  Tensor reshaped(const Tensor& tensor, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
    Tensor other = tensor;
    other.ndim = int32_t(sizes.size());
    other.shape = keep(sizes);
    other.strides = keep(strides);
    return other;
  }

  // A new contiguous tensor as one of the results, in the dtype of `like` or in float32.
  Tensor result(const Argument& like, const int64_t* sizes, int ndim, bool float32 = false) {
    PyObject* shape = PyTuple_New(ndim);
    if (!shape) throw PythonError();
    for (int i = 0; i < ndim; ++i) PyTuple_SetItem(shape, i, PyLong_FromLongLong(sizes[i]));
    PyObject* made = nullptr;
    if (!float32 || like.dtype == Dtype::float32) {
      made = PyObject_CallMethodObjArgs(like.object, new_empty, shape, nullptr);
    } else if (PyObject* method = PyObject_GetAttr(like.object, new_empty)) {
      PyObject* positional = PyTuple_Pack(1, shape);
      if (positional) made = PyObject_Call(method, positional, in_float32);
      Py_XDECREF(positional);
      Py_DECREF(method);
    }
    Py_DECREF(shape);
    if (!made) throw PythonError();
    result_[results_++] = made;
    Tensor tensor;
    expect(view(made, tensor));
    return tensor;
  }
  Tensor result(const Argument& like) { return result(like, like.shape, like.ndim); }

  // The one result, or a tuple of them.
  PyObject* results() {
    const int count = results_;
    results_ = 0;
    if (count == 1) return result_[0];
    PyObject* all = PyTuple_New(count);
    for (int i = 0; i < count; ++i) {
      if (all)
        PyTuple_SetItem(all, i, result_[i]);
      else
        Py_DECREF(result_[i]);
    }
    return all;
  }

 private:
  const int64_t* keep(std::initializer_list<int64_t> numbers) {
    const int64_t* kept = numbers_ + used_;
    for (int64_t number : numbers) numbers_[used_++] = number;
    return kept;
  }

  PyObject* result_[2] = {};
  int results_ = 0, used_ = 0;
  int64_t numbers_[32];
};

// As `run`; `prepare` also makes the results.
template <class Call, void (*const Kernels::*kernel)(const Call&, int), void (*prepare)(Call&, Step&)>
PyObject* step(PyObject*, PyObject* const* values, Py_ssize_t count) {
  try {
    Step arguments(values, count);
    Call call{};
    prepare(call, arguments);
    compute<Call, kernel>(call, arguments);
    return arguments.results();
  } catch (const NotOfItsKind&) {
    Py_RETURN_NONE;
  } catch (const PythonError&) {
    return nullptr;
  }
}

// linear_step(x, weight, bias, most_rows): x (..., in) with one distance between its rows
void prepare(Linear& call, Step& step) {
  Step::Argument x = step.required(), weight = step.required(), bias = step.optional();
  const int64_t most = step.integer();
  expect(weight.ndim == 2 && x.ndim >= 1);
  const int64_t in = weight.shape[1], out = weight.shape[0];
  expect(in > 0 && out > 0 && x.shape[x.ndim - 1] == in && x.dtype == weight.dtype);
  expect(weight.is_dense_row() && (out == 1 || weight.stride(0) == in));
  expect(!bias || bias.is({out}));
  int64_t rows = 1, stride = in, sizes[8];
  expect(x.ndim <= 8);
  sizes[x.ndim - 1] = out;
  for (int axis = x.ndim - 2; axis >= 0; --axis) {
    const int64_t size = sizes[axis] = x.shape[axis];
    if (size == 1) continue;
    if (rows == 1)
      stride = x.stride(axis);
    else
      expect(x.stride(axis) == rows * stride);
    rows *= size;
  }
  expect(rows > 0 && rows <= most);
  call.x = step.reshaped(x, {rows, in}, {stride, x.stride(-1)});
  call.weight = weight;
  call.bias = bias;
  call.out = step.reshaped(step.result(x, sizes, x.ndim), {rows, out}, {out, 1});
}

// conv1d_step(x, weight, bias, state, silu): shapes as in causal_conv1d_update, x with its axis of tokens
void prepare(Conv1d& call, Step& step) {
  Step::Argument x = step.required(), weight = step.required();
  expect(x.ndim == 3 && x.shape[1] == 1 && weight.ndim == 2);
  const int64_t batch = x.shape[0], channels = x.shape[2], width = weight.shape[1];
  expect(batch * channels * width > 0 && weight.shape[0] == channels && x.is_dense_row());
  call.bias = step.optional({channels});
  Step::Argument state = step.required();
  expect(state.ndim == 3 && state.dtype == x.dtype && state.is_dense_row());
  const int64_t tokens = state.shape[1], item = state.item_size();
  expect(state.is({batch, tokens, channels}) && tokens >= width - 1 && tokens > 0);
  call.silu = step.flag();
  call.x = x;
  call.weight = weight;
  call.initial_state = step.reshaped(state, {batch, width - 1, channels}, {state.stride(0), state.stride(1), 1});
  call.initial_state.data = state.at(0, tokens - (width - 1));
  call.out = step.result(x);
  Tensor next = step.result(state);
  for (int64_t row = 0; row < batch; ++row) {
    for (int64_t t = 1; t < tokens; ++t)
      std::memcpy(next.at(row, t - 1), state.at(row, t), size_t(channels * item));
    std::memcpy(next.at(row, tokens - 1), x.at(row), size_t(channels * item));
  }
}

// B and C (batch, 1, [groups,] d_state), with their axis of groups
Tensor with_groups(Step& step, const Step::Argument& t, int64_t batch, int64_t states) {
  expect(t.ndim == 3 || t.ndim == 4);
  const int64_t groups = t.ndim == 3 ? 1 : t.shape[2];
  expect(groups > 0 && t.shape[0] == batch && t.shape[1] == 1 && t.shape[t.ndim - 1] == states);
  return step.reshaped(t, {batch, 1, groups, states}, {t.stride(0), t.stride(1), t.ndim == 3 ? 0 : t.stride(2), t.stride(-1)});
}

// selective_scan_step(x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state): one token of selective_scan
void prepare(SelectiveScan& call, Step& step) {
  Step::Argument x = step.required();
  expect(x.ndim == 3 && x.shape[1] == 1);
  const int64_t batch = x.shape[0], channels = x.shape[2];
  Step::Argument dt = step.required(), A = step.required(), B = step.required(), C = step.required();
  expect(A.ndim == 2 && A.dtype == Dtype::float32 && dt.is({batch, 1, channels}));
  const int64_t states = A.shape[1];
  expect(A.shape[0] == channels && batch * channels * states > 0);
  call.x = x;
  call.dt = dt;
  call.A = A;
  call.B = with_groups(step, B, batch, states);
  call.C = with_groups(step, C, batch, states);
  expect(call.B.shape[2] == call.C.shape[2] && channels % call.B.shape[2] == 0);
  call.D = step.optional({channels});
  call.z = step.optional({batch, 1, channels});
  call.dt_bias = step.optional({channels});
  call.dt_softplus = step.flag();
  Step::Argument state = step.required();
  expect(state.is({batch, channels, states}) && state.dtype == Dtype::float32);
  call.initial_state = state;
  call.out = step.result(x);
  call.final_state = step.result(state);
}

// ssd_step(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_min, dt_max, initial_state): one token of ssd
void prepare(Ssd& call, Step& step) {
  Step::Argument x = step.required();
  expect(x.ndim == 4 && x.shape[1] == 1);
  const int64_t batch = x.shape[0], heads = x.shape[2], headdim = x.shape[3];
  Step::Argument dt = step.required(), A = step.required(), B = step.required(), C = step.required();
  expect(B.ndim == 4 && A.is({heads}) && A.dtype == Dtype::float32 && dt.is({batch, 1, heads}));
  const int64_t states = B.shape[3];
  expect(batch * heads * headdim * states > 0);
  SsdScan& scan = call.scan;
  scan.x = x;
  scan.dt = dt;
  scan.A = A;
  scan.B = with_groups(step, B, batch, states);
  scan.C = with_groups(step, C, batch, states);
  expect(scan.B.shape[2] == scan.C.shape[2] && heads % scan.B.shape[2] == 0);
  Step::Argument D = step.optional();
  expect(!D || D.is({heads}) || D.is({heads, headdim}));
  call.D = D;
  call.z = step.optional({batch, 1, heads, headdim});
  scan.dt_bias = step.optional({heads});
  scan.dt_softplus = step.flag();
  scan.dt_min = step.number();
  scan.dt_max = step.number();
  expect(scan.dt_min <= scan.dt_max);
  Step::Argument state = step.required();
  expect(state.is({batch, heads, headdim, states}) && state.dtype == Dtype::float32);
  call.initial_state = state;
  call.out = step.result(x);
  call.final_state = step.result(state);
}

// rms_norm_step(x, weight, gate, group_size, norm_before_gate, eps, in_dtype_of_weight): any number of rows
void prepare(RmsNorm& call, Step& step) {
  Step::Argument x = step.required(), weight = step.required(), gate = step.optional();
  call.group_size = step.integer();
  call.norm_before_gate = step.flag();
  call.eps = step.number();
  expect(x.ndim >= 1 && weight.ndim == 1 && weight.shape[0] == x.shape[x.ndim - 1] && x.is_dense_row());
  expect(call.group_size > 0 && weight.shape[0] > 0 && weight.shape[0] % call.group_size == 0);
  expect(!gate || (gate.ndim == x.ndim && gate.is_dense_row()));
  for (int axis = 0; gate && axis < x.ndim; ++axis) expect(gate.shape[axis] == x.shape[axis]);
  call.x = x;
  call.weight = weight;
  call.gate = gate;
  call.out = step.result(step.flag() ? weight : x, x.shape, x.ndim);
}

// decay_rates_step(A_log): -exp(A_log) in float32
void prepare(DecayRates& call, Step& step) {
  Step::Argument A_log = step.required();
  expect(A_log.ndim >= 1);
  int64_t count = 1;
  for (int axis = A_log.ndim - 1; axis >= 0; --axis) {
    expect(A_log.shape[axis] == 1 || A_log.stride(axis) == count);
    count *= A_log.shape[axis];
  }
  call.count = count;
  call.A_log = A_log;
  call.out = step.result(A_log, A_log.shape, A_log.ndim, true);
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

// set_up(tensor_type, parameter_type, {"dtype": float32}, path of the library whose thread pool to use)
PyObject* set_up(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "set_up takes two tensor types, a dict and a path");
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
  PyObject* path = PyUnicode_AsUTF8String(values[3]);
  if (!path) return nullptr;
  if (!new_empty && !(new_empty = PyUnicode_InternFromString("new_empty"))) return nullptr;
  PyObject** const held[] = {&tensor_type, &parameter_type, &in_float32};
  for (int i = 0; i < 3; ++i) {
    Py_INCREF(values[i]);
    Py_XDECREF(*held[i]);
    *held[i] = values[i];
  }
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
    {"linear_step", as_method(step<Linear, &Kernels::linear, prepare>), METH_FASTCALL, nullptr},
    {"conv1d_step", as_method(step<Conv1d, &Kernels::conv1d, prepare>), METH_FASTCALL, nullptr},
    {"selective_scan_step", as_method(step<SelectiveScan, &Kernels::selective_scan, prepare>), METH_FASTCALL, nullptr},
    {"ssd_step", as_method(step<Ssd, &Kernels::ssd, prepare>), METH_FASTCALL, nullptr},
    {"rms_norm_step", as_method(step<RmsNorm, &Kernels::rms_norm, prepare>), METH_FASTCALL, nullptr},
    {"decay_rates_step", as_method(step<DecayRates, &Kernels::decay_rates, prepare>), METH_FASTCALL, nullptr},
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

/* The block codecs int8 and int4, the outer step and the sketch, each in one pass over memory where numpy makes five to
 * eight.
 *
 * Specified by protocol/codecs/blocks.py, int8.py, int4.py, protocol/outer_step.py and
 * coordinator/aggregation/measuring.py: the same bits for every input.
 * So every fp32 operation here is one of theirs, rounded once and in their order. The flags in setup.py keep the compiler
 * from fusing or reordering them. Loops are plain C that compilers vectorise.
 *
 * Functions take buffers, check type, contiguity, alignment and lengths before they touch memory, and run without the
 * GIL. kernels.pyi has their signatures.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "fp32 operations must be rounded to fp32 one by one"
#endif
#ifdef __FAST_MATH__
#error "fp32 operations must be as they are written"
#endif

#define BLOCK 256              /* values that share a scale */
#define INT8_MOST 127          /* the largest code */
#define INT4_MOST 7
#define MIN_SCALE_BITS 0x0080u /* 2^-126 as bf16 */
#define MAX_SCALE_BITS 0x7B80u /* 2^120 as bf16 */

/* Each loop is written once and, on x86-64, compiled for two generations of CPUs, so that one binary runs on all. */
#ifdef __GNUC__
#define LOOP static inline __attribute__((always_inline))
/* gcc unrolls a short loop before it looks for vectors, and then finds none. */
#define KEEP_ROLLED _Pragma("GCC unroll 1")
#else
#define LOOP static inline
#define KEEP_ROLLED
#endif

LOOP float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

LOOP uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

LOOP Py_ssize_t least(Py_ssize_t a, Py_ssize_t b)
{
    return a < b ? a : b;
}

LOOP Py_ssize_t blocks_of(Py_ssize_t n)
{
    return n / BLOCK + (n % BLOCK != 0);
}

/* Scale j at the beginning of an encoded chunk. */
LOOP float scale_at(const uint8_t *data, Py_ssize_t j)
{
    return float_of((uint32_t)data[2 * j] << 16 | (uint32_t)data[2 * j + 1] << 24);
}

/* The code of x: rint(x * inverse), ties to even. Near 1.5 * 2^23, fp32 numbers are 1 apart, so the addition rounds to an
 * integer in the lowest bits. This holds up to 2^22, and codes are at most 127. */
LOOP uint8_t code_of(float x, float inverse)
{
    return (uint8_t)bits_of(x * inverse + 12582912.0f);
}

/* Prefetch the block after the next; beyond the end it does nothing. This makes encoding from memory a third faster,
 * because the CPU does not recognise reading each block twice as a stream. */
LOOP void prefetch_block(const float *x)
{
#ifdef __GNUC__
    for (uintptr_t line = 0; line < BLOCK * sizeof(float); line += 64)
        __builtin_prefetch((const void *)((uintptr_t)x + 2 * BLOCK * sizeof(float) + line));
#else
    (void)x;
#endif
}

/* Write the scale of k <= BLOCK values to data[2j]. Return false if no scale can represent them. */
LOOP bool put_scale(const float *restrict x, Py_ssize_t k, float most, uint8_t *restrict data, Py_ssize_t j, float *scale)
{
    prefetch_block(x);
    int32_t largest = 0; /* bit patterns are ordered like the magnitudes, infinity and then NaN last */
    for (Py_ssize_t i = 0; i < k; i++) {
        int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t bits = (bits_of(float_of((uint32_t)largest) / most) + 0xFFFF) >> 16; /* up */
    bits = bits > MIN_SCALE_BITS ? bits : MIN_SCALE_BITS;
    data[2 * j] = (uint8_t)bits;
    data[2 * j + 1] = (uint8_t)(bits >> 8);
    *scale = float_of(bits << 16);
    return bits <= MAX_SCALE_BITS; /* for infinity and NaN they are larger */
}

LOOP bool int8_encode_loop(const float *restrict x, Py_ssize_t n, uint8_t *restrict data)
{
    uint8_t *restrict codes = data + 2 * blocks_of(n);
    for (Py_ssize_t start = 0; start < n; start += BLOCK) {
        Py_ssize_t k = least(BLOCK, n - start);
        float scale;
        if (!put_scale(x + start, k, INT8_MOST, data, start / BLOCK, &scale))
            return false;
        float inverse = 1.0f / scale;
        for (Py_ssize_t i = 0; i < k; i++)
            codes[start + i] = code_of(x[start + i], inverse);
    }
    return true;
}

LOOP bool int4_encode_loop(const float *restrict x, Py_ssize_t n, uint8_t *restrict data)
{
    uint8_t *restrict codes = data + 2 * blocks_of(n);
    Py_ssize_t h = n / 2 + n % 2;
    for (Py_ssize_t start = 0; start < n; start += BLOCK) {
        Py_ssize_t end = least(start + BLOCK, n);
        float scale;
        if (!put_scale(x + start, end - start, INT4_MOST, data, start / BLOCK, &scale))
            return false;
        float inverse = 1.0f / scale;
        Py_ssize_t i = start;
        for (Py_ssize_t stop = least(end, h); i < stop; i++)
            codes[i] = code_of(x[i], inverse) & 0x0F;
        for (; i < end; i++)
            codes[i - h] |= (uint8_t)(code_of(x[i], inverse) << 4);
    }
    return true;
}

#define LANES 16 /* partial sums of squares; position p belongs to lane p % LANES */
#define GROUP 8  /* values whose signs are in one byte */

LOOP void sketch_value(float value, uint32_t sign, float *sketch, double *lane)
{
    *lane = *lane + (double)value * value;
    *sketch = *sketch + float_of(bits_of(value) ^ sign << 31);
}

/* Fold n values, of positions `at` and up, into a sketch of m values (a multiple of GROUP). The sign of position p is bit
 * p - at + first of `signs`, where first = at modulo GROUP. */
LOOP void sketch_loop(const float *restrict values, Py_ssize_t n, Py_ssize_t at, const uint8_t *restrict signs,
                      float *restrict sketch, Py_ssize_t m, double *restrict lanes)
{
    Py_ssize_t first = at % GROUP;
    for (Py_ssize_t i = 0; i < n;) {
        Py_ssize_t j = (at + i) % m, bit = first + i;
        Py_ssize_t rows = (at + i) % LANES == 0 ? least(n - i, m - j) / LANES : 0;
        if (rows == 0) {
            sketch_value(values[i], signs[bit / GROUP] >> bit % GROUP & 1, &sketch[j], &lanes[(at + i) % LANES]);
            i++;
            continue;
        }
        double sums[LANES];
        memcpy(sums, lanes, sizeof sums);
        for (Py_ssize_t row = 0; row < rows; row++) {
            const float *restrict x = values + i + row * LANES;
            float *restrict y = sketch + j + row * LANES;
            const uint8_t *two = signs + bit / GROUP + row * LANES / GROUP;
            uint32_t row_signs = two[0] | (uint32_t)two[1] << GROUP;
            KEEP_ROLLED
            for (int k = 0; k < LANES; k++)
                sums[k] = sums[k] + (double)x[k] * x[k];
            KEEP_ROLLED
            for (int k = 0; k < LANES; k++)
                y[k] = y[k] + float_of(bits_of(x[k]) ^ (row_signs << (31 - k) & 0x80000000u));
        }
        memcpy(lanes, sums, sizeof sums);
        i += rows * LANES;
    }
}

/* Where the bits of a code are in its byte. */
enum place { WHOLE, LOWER, UPPER };

/* What to do with the values q * s. */
enum operation { DECODE, ACCUMULATE, STEP, SKETCH };

/* `values`: the output of DECODE, the sum of ACCUMULATE, theta of STEP, or the sketch of SKETCH. */
struct operands {
    float *values, *momentum; /* momentum, rate and beta: for STEP */
    float weight;             /* for ACCUMULATE */
    float rate, beta;
    Py_ssize_t at, m; /* these four: for SKETCH, as sketch_loop's */
    const uint8_t *signs;
    double *lanes;
};

LOOP float number(uint8_t code, enum place place)
{
    int32_t high = (int32_t)((uint32_t)code << (place == LOWER ? 28 : 24)); /* to the top bits, with its sign */
    return (float)(high >> (place == WHOLE ? 24 : 28));
}

LOOP void step_value(float *theta, float *momentum, float delta, float rate, float beta)
{
    float u = *momentum * beta;
    u = u + delta;
    *momentum = u;
    float t = u * beta;
    t = t + delta;
    t = t * rate;
    *theta = *theta - t;
}

/* Apply the operation to k values from index `start` on, which share the scale. */
LOOP void run(const uint8_t *restrict codes, Py_ssize_t k, enum place place, float scale, enum operation operation,
              struct operands on, Py_ssize_t start)
{
    if (operation == SKETCH) {
        float decoded[BLOCK];
        for (Py_ssize_t i = 0; i < k; i++)
            decoded[i] = number(codes[i], place) * scale;
        const uint8_t *signs = on.signs + (on.at % GROUP + start) / GROUP;
        sketch_loop(decoded, k, on.at + start, signs, on.values, on.m, on.lanes);
        return;
    }
    float *restrict values = on.values + start;
    float *restrict momentum = operation == STEP ? on.momentum + start : NULL;
    if (operation == ACCUMULATE)
        scale = scale * on.weight;
    for (Py_ssize_t i = 0; i < k; i++) {
        float value = number(codes[i], place) * scale;
        if (operation == DECODE)
            values[i] = value;
        else if (operation == ACCUMULATE)
            values[i] = values[i] + value;
        else
            step_value(&values[i], &momentum[i], value, on.rate, on.beta);
    }
}

/* Apply the operation to all n values of an encoded chunk, block by block. */
LOOP void each_block(const uint8_t *restrict data, Py_ssize_t n, bool int4, enum operation operation, struct operands on)
{
    const uint8_t *restrict codes = data + 2 * blocks_of(n);
    Py_ssize_t h = int4 ? n / 2 + n % 2 : n; /* codes from index h on are in the upper half-bytes */
    for (Py_ssize_t start = 0; start < n; start += BLOCK) {
        Py_ssize_t end = least(start + BLOCK, n), i = start;
        float scale = scale_at(data, start / BLOCK);
        if (start < h) {
            i = least(end, h);
            run(codes + start, i - start, int4 ? LOWER : WHOLE, scale, operation, on, start);
        }
        if (int4)
            run(codes + i - h, end - i, UPPER, scale, operation, on, i);
    }
}

LOOP void outer_step_loop(float *restrict theta, float *restrict momentum, const float *restrict delta, Py_ssize_t n,
                          float rate, float beta)
{
    for (Py_ssize_t i = 0; i < n; i++)
        step_value(&theta[i], &momentum[i], delta[i], rate, beta);
}

typedef bool encode_function(const float *x, Py_ssize_t n, uint8_t *data);
typedef void decode_function(const uint8_t *data, Py_ssize_t n, struct operands on);

struct codec {
    encode_function *encode;
    decode_function *decode, *accumulate, *step, *sketch;
};

struct generation {
    const char *name;
    struct codec int8, int4;
    void (*outer_step)(float *theta, float *momentum, const float *delta, Py_ssize_t n, float rate, float beta);
    void (*sketch)(const float *values, Py_ssize_t n, Py_ssize_t at, const uint8_t *signs, float *sketch, Py_ssize_t m,
                   double *lanes);
};

/* The loops of one codec, then of all codecs, for one generation of CPUs. */
#define CODEC(CODEC, IS_INT4, GENERATION, TARGET)                                                                       \
    TARGET static bool CODEC##_encode_##GENERATION(const float *x, Py_ssize_t n, uint8_t *data)                        \
    {                                                                                                                  \
        return CODEC##_encode_loop(x, n, data);                                                                        \
    }                                                                                                                  \
    TARGET static void CODEC##_decode_##GENERATION(const uint8_t *data, Py_ssize_t n, struct operands on)              \
    {                                                                                                                  \
        each_block(data, n, IS_INT4, DECODE, on);                                                                      \
    }                                                                                                                  \
    TARGET static void CODEC##_accumulate_##GENERATION(const uint8_t *data, Py_ssize_t n, struct operands on)          \
    {                                                                                                                  \
        each_block(data, n, IS_INT4, ACCUMULATE, on);                                                                  \
    }                                                                                                                  \
    TARGET static void CODEC##_step_##GENERATION(const uint8_t *data, Py_ssize_t n, struct operands on)                \
    {                                                                                                                  \
        each_block(data, n, IS_INT4, STEP, on);                                                                        \
    }                                                                                                                  \
    TARGET static void CODEC##_sketch_##GENERATION(const uint8_t *data, Py_ssize_t n, struct operands on)              \
    {                                                                                                                  \
        each_block(data, n, IS_INT4, SKETCH, on);                                                                      \
    }
#define FUNCTIONS(CODEC, GENERATION)                                                                                    \
    {                                                                                                                  \
        CODEC##_encode_##GENERATION, CODEC##_decode_##GENERATION, CODEC##_accumulate_##GENERATION,                     \
            CODEC##_step_##GENERATION, CODEC##_sketch_##GENERATION                                                     \
    }
#define GENERATION(GENERATION, TARGET)                                                                                  \
    CODEC(int8, false, GENERATION, TARGET)                                                                             \
    CODEC(int4, true, GENERATION, TARGET)                                                                              \
    TARGET static void outer_step_##GENERATION(float *theta, float *momentum, const float *delta, Py_ssize_t n,        \
                                               float rate, float beta)                                                 \
    {                                                                                                                  \
        outer_step_loop(theta, momentum, delta, n, rate, beta);                                                        \
    }                                                                                                                  \
    TARGET static void sketch_##GENERATION(const float *values, Py_ssize_t n, Py_ssize_t at, const uint8_t *signs,     \
                                           float *sketch, Py_ssize_t m, double *lanes)                                 \
    {                                                                                                                  \
        sketch_loop(values, n, at, signs, sketch, m, lanes);                                                           \
    }                                                                                                                  \
    static const struct generation GENERATION = {#GENERATION, FUNCTIONS(int8, GENERATION),                             \
                                                 FUNCTIONS(int4, GENERATION), outer_step_##GENERATION, sketch_##GENERATION};

#if defined(__x86_64__) && defined(__GNUC__)
GENERATION(avx2, __attribute__((target("avx2"))))
#endif
GENERATION(baseline, )

/* The generations that this CPU supports, fastest first, and the one in use. */
static const struct generation *generations[2], *kernels;
static int generations_count;

static void find_generations(void)
{
    generations_count = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        generations[generations_count++] = &avx2;
#endif
    generations[generations_count++] = &baseline;
    kernels = generations[0];
}

static void release(Py_buffer *views, int count)
{
    while (count > 0)
        PyBuffer_Release(&views[--count]);
}

/* Get the buffers of the vectors, one per letter of `types`: d float64, f float32, u uint8, upper case if it is written
 * to. They are held until `release`. */
static bool get_vectors(PyObject *const *objects, const char *types, Py_buffer *views)
{
    for (int i = 0; types[i] != 0; i++) {
        bool is_written = types[i] < 'a';
        char type = is_written ? (char)(types[i] - 'A' + 'a') : types[i];
        const char *expected = type == 'd' ? "d" : type == 'f' ? "f" : "B";
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(objects[i], &views[i], flags) < 0) {
            release(views, i);
            return false;
        }
        const char *format = views[i].format;
        bool is_right = format != NULL && strcmp(format, expected) == 0;
        if (!is_right || views[i].ndim != 1 || (uintptr_t)views[i].buf % (uintptr_t)views[i].itemsize != 0) {
            release(views, i + 1);
            PyErr_Format(PyExc_ValueError, "argument %d is not an aligned vector of %s", i + 1,
                         type == 'd' ? "float64" : type == 'f' ? "float32" : "uint8");
            return false;
        }
    }
    return true;
}

static bool has_length(const Py_buffer *view, Py_ssize_t length, const char *what)
{
    if (view->len == length * view->itemsize)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd elements, not %zd", what, view->len / view->itemsize, length);
    return false;
}

static Py_ssize_t size_of(Py_ssize_t n, bool int4)
{
    return 2 * blocks_of(n) + (int4 ? n / 2 + n % 2 : n);
}

static PyObject *encode(PyObject *args, const struct codec *codec, bool int4)
{
    PyObject *objects[2], *result = NULL;
    Py_buffer views[2];
    if (!PyArg_ParseTuple(args, "OO", &objects[0], &objects[1]) || !get_vectors(objects, "fU", views))
        return NULL;
    Py_ssize_t n = views[0].len / 4;
    if (has_length(&views[1], size_of(n, int4), "out")) {
        bool fits;
        Py_BEGIN_ALLOW_THREADS
        fits = codec->encode(views[0].buf, n, views[1].buf);
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(fits);
    }
    release(views, 2);
    return result;
}

static PyObject *decode_into(PyObject *const *objects, decode_function *function, struct operands on, bool int4,
                             int vectors)
{
    Py_buffer views[3];
    PyObject *result = NULL;
    if (!get_vectors(objects, vectors == 3 ? "uFF" : "uF", views))
        return NULL;
    Py_ssize_t n = views[1].len / 4;
    if (has_length(&views[0], size_of(n, int4), "data") && (vectors < 3 || has_length(&views[2], n, "momentum"))) {
        on.values = views[1].buf;
        if (vectors == 3)
            on.momentum = views[2].buf;
        Py_BEGIN_ALLOW_THREADS
        function(views[0].buf, n, on);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(views, vectors);
    return result;
}

static PyObject *decode(PyObject *args, const struct codec *codec, bool int4)
{
    PyObject *objects[2];
    struct operands on = {0};
    if (!PyArg_ParseTuple(args, "OO", &objects[0], &objects[1]))
        return NULL;
    return decode_into(objects, codec->decode, on, int4, 2);
}

static PyObject *accumulate(PyObject *args, const struct codec *codec, bool int4)
{
    PyObject *objects[2];
    struct operands on = {0};
    if (!PyArg_ParseTuple(args, "OfO", &objects[0], &on.weight, &objects[1]))
        return NULL;
    return decode_into(objects, codec->accumulate, on, int4, 2);
}

static PyObject *step(PyObject *args, const struct codec *codec, bool int4)
{
    PyObject *objects[3];
    struct operands on = {0};
    if (!PyArg_ParseTuple(args, "OOOff", &objects[0], &objects[1], &objects[2], &on.rate, &on.beta))
        return NULL;
    return decode_into(objects, codec->step, on, int4, 3);
}

static PyObject *outer_step(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[3], *result = NULL;
    Py_buffer views[3];
    float rate, beta;
    if (!PyArg_ParseTuple(args, "OOOff", &objects[0], &objects[1], &objects[2], &rate, &beta) ||
        !get_vectors(objects, "FFf", views))
        return NULL;
    Py_ssize_t n = views[0].len / 4;
    if (has_length(&views[1], n, "momentum") && has_length(&views[2], n, "delta")) {
        Py_BEGIN_ALLOW_THREADS
        kernels->outer_step(views[0].buf, views[1].buf, views[2].buf, n, rate, beta);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(views, 3);
    return result;
}

/* Sketch the vector of the first argument. Without a codec it is the values themselves, else n of them, encoded. */
static PyObject *sketch(PyObject *args, const struct codec *codec, bool int4)
{
    PyObject *objects[4], *result = NULL;
    Py_buffer views[4];
    Py_ssize_t n, at;
    if (!PyArg_ParseTuple(args, "OnnOOO", &objects[0], &n, &at, &objects[1], &objects[2], &objects[3]) ||
        !get_vectors(objects, codec == NULL ? "fuFD" : "uuFD", views))
        return NULL;
    Py_ssize_t m = views[2].len / 4;
    if (n < 0 || n > 2 * views[0].len || at < 0 || m == 0 || m % GROUP != 0 ||
        views[1].len * GROUP < at % GROUP + n)
        PyErr_SetString(PyExc_ValueError,
                        "a sketch of no multiple of 8 values, too few values or signs, or a negative position");
    else if (has_length(&views[0], codec == NULL ? n : size_of(n, int4), "values") &&
             has_length(&views[3], LANES, "lanes")) {
        struct operands on = {.values = views[2].buf, .at = at, .m = m, .signs = views[1].buf, .lanes = views[3].buf};
        Py_BEGIN_ALLOW_THREADS
        if (codec == NULL)
            kernels->sketch(views[0].buf, n, at, on.signs, on.values, m, on.lanes);
        else
            codec->sketch(views[0].buf, n, on);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(views, 4);
    return result;
}

static PyObject *sketch_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    return sketch(args, NULL, false);
}

static PyObject *get_generations(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < generations_count; i++) {
        PyObject *name = PyUnicode_FromString(generations[i]->name);
        if (name == NULL || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    for (int i = 0; i < generations_count; i++)
        if (strcmp(generations[i]->name, name) == 0) {
            kernels = generations[i];
            return Py_NewRef(Py_None);
        }
    return PyErr_Format(PyExc_ValueError, "this CPU does not run %s", name);
}

#define METHOD(CODEC, IS_INT4, FUNCTION)                                                                                \
    static PyObject *CODEC##_##FUNCTION(PyObject *Py_UNUSED(module), PyObject *args)                                   \
    {                                                                                                                  \
        return FUNCTION(args, &kernels->CODEC, IS_INT4);                                                               \
    }
METHOD(int8, false, encode)
METHOD(int8, false, decode)
METHOD(int8, false, accumulate)
METHOD(int8, false, step)
METHOD(int8, false, sketch)
METHOD(int4, true, encode)
METHOD(int4, true, decode)
METHOD(int4, true, accumulate)
METHOD(int4, true, step)
METHOD(int4, true, sketch)

static PyMethodDef methods[] = {
    {"int8_encode", int8_encode, METH_VARARGS, NULL},
    {"int8_decode", int8_decode, METH_VARARGS, NULL},
    {"int8_accumulate", int8_accumulate, METH_VARARGS, NULL},
    {"int8_step", int8_step, METH_VARARGS, NULL},
    {"int8_sketch", int8_sketch, METH_VARARGS, NULL},
    {"int4_encode", int4_encode, METH_VARARGS, NULL},
    {"int4_decode", int4_decode, METH_VARARGS, NULL},
    {"int4_accumulate", int4_accumulate, METH_VARARGS, NULL},
    {"int4_step", int4_step, METH_VARARGS, NULL},
    {"int4_sketch", int4_sketch, METH_VARARGS, NULL},
    {"outer_step", outer_step, METH_VARARGS, NULL},
    {"sketch", sketch_values, METH_VARARGS, NULL},
    {"generations", get_generations, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "protocol.kernels", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit_kernels(void)
{
    find_generations();
    return PyModuleDef_Init(&definition);
}

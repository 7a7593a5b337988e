// The BLAS that SciPy carries. Its functions arrive as pointers from scipy.linalg.cython_blas, so nothing is linked.

#ifndef JAX_GG_CPU_BLAS_H_
#define JAX_GG_CPU_BLAS_H_

namespace jax_gg::cpu {

// Fortran's xGEMM: op(A) op(B), column-major, every argument by reference.
template <typename T>
using GemmFunction = void(char* trans_a, char* trans_b, int* m, int* n, int* k, T* alpha, T* a, int* lda, T* b,
                          int* ldb, T* beta, T* c, int* ldc);

struct Blas {
  GemmFunction<float>* sgemm = nullptr;
  GemmFunction<double>* dgemm = nullptr;
};

// Set once, by the module, before any handler is registered.
inline Blas& TheBlas() {
  static Blas blas;
  return blas;
}

inline GemmFunction<float>* GemmOf(float) { return TheBlas().sgemm; }
inline GemmFunction<double>* GemmOf(double) { return TheBlas().dgemm; }

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_BLAS_H_

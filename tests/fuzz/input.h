// What both targets need: reading the fuzzer's bytes, arrays of exact size, checks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

// Ends the process, which libFuzzer takes for a crash, so that the input is kept.
#define CHECK(condition)                                                                             \
    do {                                                                                             \
        if (!(condition)) {                                                                          \
            std::fprintf(stderr, "CHECK failed: %s, at %s:%d\n", #condition, __FILE__, __LINE__);    \
            std::abort();                                                                            \
        }                                                                                            \
    } while (false)

// Reads from front to back; past the end there are zeros.
class Input {
public:
    Input(const uint8_t* data, size_t size) : at_(data), left_(static_cast<int64_t>(size)) {}

    int64_t left() const { return left_; }

    template <typename Word>
    Word take() {
        uint8_t bytes[sizeof(Word)] = {};
        take_into(bytes, sizeof(Word));
        Word word;
        std::memcpy(&word, bytes, sizeof word);
        return word;
    }

    void take_into(uint8_t* to, int64_t num_bytes) {
        num_bytes = std::min(num_bytes, left_);
        if (num_bytes > 0) std::memcpy(to, at_, static_cast<size_t>(num_bytes));
        at_ += num_bytes, left_ -= num_bytes;
    }

private:
    const uint8_t* at_;
    int64_t left_;
};

// A heap block of its own that ends with its last element: the address sanitizer sees one byte too far. It begins with
// so many elements that nobody uses, for other alignments. All zero at first.
template <typename Element>
class Block {
public:
    explicit Block(int64_t numel, int64_t unused = 0)
        : numel_(numel), unused_(unused), elements_(new Element[static_cast<size_t>(unused + numel)]()) {}

    Element* data() { return elements_.get() + unused_; }
    const Element* data() const { return elements_.get() + unused_; }
    int64_t numel() const { return numel_; }
    Element& operator[](int64_t i) { return data()[i]; }
    Element operator[](int64_t i) const { return data()[i]; }

private:
    int64_t numel_, unused_;
    std::unique_ptr<Element[]> elements_;
};

template <typename Element>
bool same_bits(const Block<Element>& a, const Block<Element>& b) {
    return a.numel() == b.numel() &&
           (a.numel() == 0 || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.numel()) * sizeof(Element)) == 0);
}

// The same, where any NaN equals any other: which one a sum of two gives is left open.
template <typename Real>
bool same_numbers(const Block<Real>& a, const Block<Real>& b) {
    for (int64_t i = 0; i < a.numel(); ++i) {
        const Real left = a[i], right = b[i];
        const bool both_nan = left != left && right != right;
        if (!both_nan && std::memcmp(&left, &right, sizeof left) != 0) return false;
    }
    return a.numel() == b.numel();
}

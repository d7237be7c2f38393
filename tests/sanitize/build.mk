# Builds the plain C++ layer of ext/ with sanitizers, into programs without Python. `make fuzz` and `make tsan` call it:
#   make -f tests/sanitize/build.mk OUT=build/fuzz CXX=clang++ fuzz      OUT/decode, OUT/encode
#   make -f tests/sanitize/build.mk OUT=build/tsan CXX=g++ SANITIZE=-fsanitize=thread threads       OUT/threads
.DELETE_ON_ERROR:
.SECONDARY:

# all but what needs Python or CUDA
PLAIN := $(filter-out module %_module nanobind_unit,$(basename $(notdir $(wildcard ext/*.cpp))))
# those of setup.py that change what is computed
FLAGS := -std=c++17 -O2 -g1 -Wall -Wextra -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-strict-aliasing \
    -fno-omit-frame-pointer -pthread -MMD -MP

# libFuzzer looks at what ext/ does, not at how the targets check it: that would take most of the time
fuzz: FLAGS += -fsanitize=address,undefined -fno-sanitize-recover=all
fuzz: COVERAGE := -fsanitize=fuzzer
fuzz: $(OUT)/decode $(OUT)/encode

threads: FLAGS += $(SANITIZE)
threads: $(OUT)/threads

$(OUT)/decode $(OUT)/encode: $(OUT)/%: $(OUT)/%.o $(OUT)/chosen.o $(OUT)/portable.o \
    $(PLAIN:%=$(OUT)/ext/%.o) $(PLAIN:%=$(OUT)/portable/%.o)
	$(CXX) $(FLAGS) $(COVERAGE) $^ -o $@

$(OUT)/threads: $(OUT)/threads.o $(PLAIN:%=$(OUT)/ext/%.o)
	$(CXX) $(FLAGS) $^ -o $@

$(OUT)/chosen.o: tests/fuzz/codecs.cpp
	$(CXX) $(FLAGS) -DCODECS=chosen_codecs -DISA='"auto"' -c $< -o $@

$(OUT)/portable.o: tests/fuzz/codecs.cpp
	$(CXX) $(FLAGS) -Dhpcps=hpcps_portable -DCODECS=portable_codecs -DISA='"portable"' -c $< -o $@

$(OUT)/ext/%.o: ext/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) $(COVERAGE) -c $< -o $@

$(OUT)/portable/%.o: ext/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) $(COVERAGE) -Dhpcps=hpcps_portable -c $< -o $@

$(OUT)/%.o: tests/fuzz/%.cpp
	$(CXX) $(FLAGS) -c $< -o $@

$(OUT)/%.o: tests/sanitize/%.cpp
	$(CXX) $(FLAGS) -c $< -o $@

-include $(wildcard $(OUT)/*.d $(OUT)/*/*.d)
